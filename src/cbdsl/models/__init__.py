"""Network descriptions, and conversion from and to torch modules."""
