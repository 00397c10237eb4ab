"""Parallel decoding by jacobi-forcing, drafted by the adapter beside it, verified by its base."""

try:
    import jacobi_forcing
except ImportError as error:
    raise ImportError("This model decodes in parallel by: pip install jacobi-forcing") from error


def generate(*inputs, model, **settings):
    """What the library's generate takes, on the base of this adapter; `decode` replaces the saved settings."""
    return jacobi_forcing.generate_with_adapter(model, *inputs, **settings)
