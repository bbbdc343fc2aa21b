"""Authentication with django-allauth: login, second factors, single sign-on, sessions."""
