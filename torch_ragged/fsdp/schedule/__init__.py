"""Schedules: which modules stay unsharded, and which all-gathers are issued when, found from the times of recorded steps.

Training must not depend on it: without :meth:`FSDPModule.set_schedule`, nothing here runs.
"""
