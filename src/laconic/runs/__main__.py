"""`python -m laconic.runs FOLDER [--resume]` is one rank of the run that the folder's settings describe."""

import sys

from laconic.runs.worker import leave, main

leave(main(sys.argv[1:]))
