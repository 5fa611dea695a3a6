"""Tokenizers behind one interface, a file for each library: see build.py."""
