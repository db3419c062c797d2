"""`python -m thinwire.runs FOLDER [--resume]` is one rank of the run that the folder's settings describe."""

import sys

from thinwire.runs.worker import leave, main

leave(main(sys.argv[1:]))
