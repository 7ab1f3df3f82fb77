"""Where other programs look for the files of an export, and the files that they want beside.

A layout adds small files and names, never a copy of the weights.
"""
