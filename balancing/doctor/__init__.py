"""What is installed on this machine, what will run on it, and what each missing piece costs."""
