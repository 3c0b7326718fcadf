"""No out-of-memory regression gets merged: what a step takes is locked, measured again, and compared."""
