"""What isogemm knows of other libraries' models. None of them is imported."""
