import sys

from torch_ragged.offline._cli import main

sys.exit(main())
