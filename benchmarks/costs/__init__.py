"""Costs: measured rates against the table that planners read, and forecasts against published figures."""
