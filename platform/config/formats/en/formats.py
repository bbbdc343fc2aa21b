"""Date formats that sort, are unambiguous in every country, and include the time zone."""

DATE_FORMAT = SHORT_DATE_FORMAT = "Y-m-d"
TIME_FORMAT = "H:i"
DATETIME_FORMAT = SHORT_DATETIME_FORMAT = "Y-m-d H:i e"
MONTH_DAY_FORMAT = "M j"
