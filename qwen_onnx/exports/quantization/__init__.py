"""Matrices as integers: in blocks, rounded one by one or by what the products make of the error."""
