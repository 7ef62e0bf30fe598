import sys

from torch_ragged.fsdp.plan._cli import main

sys.exit(main())
