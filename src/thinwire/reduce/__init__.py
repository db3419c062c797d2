"""Means over all ranks and over neighbours, of plain and of compressed vectors."""
