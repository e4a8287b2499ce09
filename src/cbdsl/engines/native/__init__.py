"""C++ sources and the built library of the native engine."""
