"""The errors a user is meant to read."""


class UserError(Exception):
    """One line for the user: what was found, what was wanted, what to do. The CLI prints it and exits 1."""


class NonFiniteLogitsError(UserError):
    """The model computed NaN or infinity: its numbers overflowed, and no token can be chosen from them."""
