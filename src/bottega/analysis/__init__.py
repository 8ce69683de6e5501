"""What a run means: doctor, inspect, verify-resume, ledger."""
