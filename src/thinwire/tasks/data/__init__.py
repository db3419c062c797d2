"""Where examples come from, how they are drawn and how they are dealt out to workers."""
