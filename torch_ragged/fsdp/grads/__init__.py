"""Gradients that wait for a later reduction, as ``.grad`` shows them between passes. Core calls this as ``GradientView``.

Nothing here decides when gradients are reduced. Reading one of them is a collective; the program asks for it on all ranks.
"""
