from django.http import HttpRequest
from ninja import Router, Schema

from portal.api.auth import user_of
from portal.api.requests import allow_only
from portal.models import Project

router = Router()


class MeOut(Schema):
    username: str
    email: str
    admin: bool
    projects: list[str]
    default_project: str | None


@router.get("", response=MeOut, url_name="me", summary="Who I am")
def me(request: HttpRequest) -> MeOut:
    allow_only(request)
    user = user_of(request)
    projects = list(Project.objects.visible_to(user))
    personal = next((project.name for project in projects if project.personal_owner_id == user.pk), None)
    return MeOut(
        username=user.username,
        email=user.email,
        admin=user.is_superuser,
        projects=[project.name for project in projects],
        default_project=personal,
    )
