"""What is installed on this machine, and what to say of a package that is broken."""
