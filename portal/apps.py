from django.apps import AppConfig


class PortalConfig(AppConfig):
    name = "portal"
    verbose_name = "gpuyard"
    default_auto_field = "django.db.models.BigAutoField"
