"""`tandem doctor`: examines this machine for what Tandem needs, and names a remedy for each thing that it lacks."""
