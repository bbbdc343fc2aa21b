"""Settings on Django's page of an error with QUIRE_DEBUG."""

import re

from django.views.debug import SafeExceptionReporterFilter


class WithoutAddresses(SafeExceptionReporterFilter):
    """Hides settings that hold addresses as well: passwords are in those of ours."""

    hidden_settings = re.compile(
        rf"{SafeExceptionReporterFilter.hidden_settings.pattern}|(DATABASE|REDIS|SMTP|BROKER)_URL"
        "|RESULT_BACKEND|LOCATION|^hosts$|OTLP",
        re.IGNORECASE,
    )
