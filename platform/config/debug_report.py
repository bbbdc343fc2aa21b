"""Filter for the settings shown on Django's error page with QUIRE_DEBUG."""

import re

from django.views.debug import SafeExceptionReporterFilter


class WithoutAddresses(SafeExceptionReporterFilter):
    """Also hides settings that hold URLs, because those may contain passwords."""

    hidden_settings = re.compile(
        rf"{SafeExceptionReporterFilter.hidden_settings.pattern}|(DATABASE|REDIS|SMTP|BROKER)_URL"
        "|RESULT_BACKEND|LOCATION|^hosts$|OTLP",
        re.IGNORECASE,
    )
