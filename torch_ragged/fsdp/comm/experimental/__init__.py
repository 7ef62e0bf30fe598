"""Collectives over memory that ranks share, which users choose with ``set_collectives``. Not run on several GPUs yet."""
