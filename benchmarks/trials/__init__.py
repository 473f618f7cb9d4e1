"""What trials by the clock decide in bad cases."""
