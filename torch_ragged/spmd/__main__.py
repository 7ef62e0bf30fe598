import sys

from torch_ragged.spmd._cli import main

sys.exit(main())
