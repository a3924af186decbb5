"""The admin console: accounts, projects, nodes, and a read-only view of everything that services write."""

from typing import Any, cast

from allauth.account.models import EmailAddress
from django.contrib import admin
from django.contrib.auth.admin import UserAdmin as DjangoUserAdmin
from django.contrib.auth.models import Group
from django.db import models
from django.http import HttpRequest
from unfold.admin import ModelAdmin, TabularInline
from unfold.forms import AdminPasswordChangeForm, UserChangeForm, UserCreationForm

from portal.models import Allocation, ApiToken, Attempt, Event, Gpu, Job, Membership, Node, Project, User
from portal.services import accounts, nodes, tokens

admin.site.unregister(Group)
admin.site.unregister(EmailAddress)  # addresses stand with their user


class ReadOnlyAdmin(ModelAdmin):
    """For rows that only services may write: an edit here would go around the one door for states."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: models.Model | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: models.Model | None = None) -> bool:
        return False


class MembershipInline(TabularInline):
    model = Membership
    extra = 0


@admin.register(User)
class UserAdmin(DjangoUserAdmin, ModelAdmin):
    form, add_form, change_password_form = UserChangeForm, UserCreationForm, AdminPasswordChangeForm
    list_display = ("username", "email", "is_superuser", "is_active", "last_login")
    inlines = (MembershipInline,)

    def save_model(self, request: HttpRequest, obj: User, form: Any, change: bool) -> None:
        super().save_model(request, obj, form, change)
        accounts.welcome(obj)


@admin.register(Project)
class ProjectAdmin(ModelAdmin):
    list_display = ("name", "personal_owner", "created_at")
    search_fields = ("name",)
    inlines = (MembershipInline,)


@admin.register(ApiToken)
class ApiTokenAdmin(ReadOnlyAdmin):
    list_display = ("prefix", "name", "user", "created_at", "expires_at", "last_used_at", "revoked_at")
    list_filter = ("user",)
    exclude = ("digest",)
    actions = ("revoke",)

    @admin.action(description="Revoke the chosen tokens", permissions=["view"])
    def revoke(self, request: HttpRequest, chosen: models.QuerySet[ApiToken]) -> None:
        for token in chosen:
            tokens.revoke(token)


@admin.register(Node)
class NodeAdmin(ModelAdmin):
    """Permission to get work is an admin's to give; what a node said of itself is not editable."""

    list_display = ("name", "state", "state_since", "schedulable", "driver", "last_heartbeat_at", "problem")
    list_filter = ("state", "schedulable")
    fields = (
        "name",
        "state",
        "schedulable",
        "cordon_reason",
        "hostname",
        "driver",
        "cuda",
        "problem",
        "last_heartbeat_at",
    )
    readonly_fields = ("name", "state", "hostname", "driver", "cuda", "problem", "last_heartbeat_at")

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: models.Model | None = None) -> bool:
        return False

    def save_model(self, request: HttpRequest, obj: Node, form: Any, change: bool) -> None:
        nodes.set_schedulable(obj, obj.schedulable, reason=obj.cordon_reason, actor=cast(User, request.user))


@admin.register(Gpu)
class GpuAdmin(ReadOnlyAdmin):
    list_display = ("node", "index", "model", "uuid", "state", "present")
    list_filter = ("model", "state", "present", "node")
    search_fields = ("uuid",)


class AttemptInline(TabularInline):
    model = Attempt
    fields = ("number", "state", "reason", "exit_code", "message", "started_at", "ended_at")
    readonly_fields = fields
    extra = 0
    can_delete = False

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@admin.register(Job)
class JobAdmin(ReadOnlyAdmin):
    list_display = ("id", "name", "owner", "project", "state", "gpu_count", "submitted_at", "end_message")
    list_filter = ("state", "project")
    search_fields = ("name", "owner__username")
    inlines = (AttemptInline,)


@admin.register(Allocation)
class AllocationAdmin(ReadOnlyAdmin):
    list_display = ("gpu", "attempt", "rank", "allocated_at", "released_at")
    list_filter = (("released_at", admin.EmptyFieldListFilter),)
    list_select_related = ("gpu__node", "attempt")


@admin.register(Event)
class EventAdmin(ReadOnlyAdmin):
    list_display = ("at", "kind", "job", "node", "actor", "from_state", "to_state", "message")
    list_filter = ("kind",)
    list_select_related = ("job", "node", "actor")
