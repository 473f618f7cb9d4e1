"""The HTML page of a report, and its figures. What is printed is in `balancing.report`."""
