"""Measured configurations, one module per architecture; `isogemm.core.tables` states their format and loads them."""
