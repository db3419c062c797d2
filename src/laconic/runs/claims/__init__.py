"""One module for each claim, with what it measures; listed in `laconic.runs.reproductions`."""
