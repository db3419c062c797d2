"""Where a codec meets a communicator: means over all workers or over neighbours, in coded form."""
