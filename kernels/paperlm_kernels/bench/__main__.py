"""`python -m paperlm_kernels.bench <operation>`"""

import sys

from paperlm_kernels.bench.command import main

sys.exit(main())
