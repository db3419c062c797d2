"""Over which wire: torch.distributed, threads of one process, or a counter that carries nothing."""
