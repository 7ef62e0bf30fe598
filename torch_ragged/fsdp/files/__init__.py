"""Files: scratch files of tiers, read and written as a whole (``_scratch_file``) or mapped into memory (``_mapped_file``).

They know neither parameters nor optimizers.
"""
