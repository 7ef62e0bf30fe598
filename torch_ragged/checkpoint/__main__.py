"""Entry point of ``python -m torch_ragged.checkpoint``."""

import sys

from torch_ragged.checkpoint._cli import main

sys.exit(main())
