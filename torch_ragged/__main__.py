"""Entry point of ``python -m torch_ragged``, which is also ``torch-ragged``."""

import sys

from torch_ragged._command_line import main

sys.exit(main())
