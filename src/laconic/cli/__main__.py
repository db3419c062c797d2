"""`python -m laconic.cli` is `laconic`."""

import sys

from laconic.cli import main

sys.exit(main())
