# SPDX-License-Identifier: Apache-2.0
"""`python -m thinwire` is `thinwire`."""

import sys

from thinwire.cli import main

sys.exit(main())
