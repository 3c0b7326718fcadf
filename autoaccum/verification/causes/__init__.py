"""Why an accumulated step is not the full batch's: found by experiment."""
