"""Issues of real repositories, of SWE-bench and data sets of its kind."""
