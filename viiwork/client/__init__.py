"""What programs that use a viiwork mesh import."""
