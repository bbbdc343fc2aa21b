"""Submit, detokenise, find stop strings, count and bill: what every endpoint shares."""
