"""What the fleet decided and why: joins, losses, moves, refusals, certificates. Kept in SQL for days."""
