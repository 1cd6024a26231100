"""`python -m paperlm <verb>`"""

import sys

from paperlm.cli import main

sys.exit(main())
