"""What isogemm knows about models of other libraries, none of which is imported."""
