"""Who somebody is: log-in, second factors, single sign-on, sessions. By django-allauth."""
