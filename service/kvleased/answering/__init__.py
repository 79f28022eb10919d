"""What happens around a verb: who is admitted, whose call is a retry, who waits, what is done behind the answer."""
