# SPDX-License-Identifier: Apache-2.0
"""`python -m thinwire.lab.runs FOLDER [--resume]` is one rank of the run that the folder's settings describe."""

import sys

from thinwire.lab.runs.worker import exit_process, main

exit_process(main(sys.argv[1:]))
