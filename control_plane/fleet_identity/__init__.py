"""Who belongs to the fleet: its certificate authority in SQL, join tokens, enrolment, the deny list."""
