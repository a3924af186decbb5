"""People, their projects, and the tokens by which programs act for them."""

from django.contrib.auth.models import AbstractUser
from django.db import models


class User(AbstractUser):
    """A person. The first one to sign up is admin (`is_superuser`), later ones are members."""

    class Meta:
        ordering = ["username"]

    @property
    def initials(self) -> str:
        words = (self.get_full_name() or self.username).replace(".", " ").replace("-", " ").split()
        return "".join(word[0] for word in words[:2]).upper()


class ProjectQuerySet(models.QuerySet["Project"]):
    def visible_to(self, user: User) -> "ProjectQuerySet":
        return self if user.is_superuser else self.filter(memberships__user=user).distinct()


class Project(models.Model):
    """A team. Every user also has a personal project of their own name."""

    name = models.SlugField(max_length=40, unique=True)
    personal_owner = models.OneToOneField(User, models.CASCADE, null=True, blank=True, related_name="personal_project")
    created_at = models.DateTimeField(auto_now_add=True)

    objects = ProjectQuerySet.as_manager()

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class Membership(models.Model):
    class Role(models.TextChoices):
        MEMBER = "member"
        MANAGER = "manager"

    project = models.ForeignKey(Project, models.CASCADE, related_name="memberships")
    user = models.ForeignKey(User, models.CASCADE, related_name="memberships")
    role = models.CharField(max_length=10, choices=Role.choices, default=Role.MEMBER)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["project", "user"], name="membership_once")]

    def __str__(self) -> str:
        return f"{self.user} in {self.project}"


class ApiToken(models.Model):
    """A bearer token. Only its SHA-256 is kept; the token itself is shown once."""

    user = models.ForeignKey(User, models.CASCADE, related_name="tokens")
    name = models.CharField(max_length=60)
    prefix = models.CharField(max_length=12)
    digest = models.CharField(max_length=64, unique=True)
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField(null=True, blank=True)
    last_used_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-created_at"]
        verbose_name = "API token"

    def __str__(self) -> str:
        return f"{self.prefix}… ({self.name})"
