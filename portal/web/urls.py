"""Addresses of the pages."""

from allauth.account import views as allauth
from django.urls import URLPattern, path

from portal.web import accounts, hardware, health, jobs, live, nodes, overview, submit

urlpatterns: list[URLPattern] = [
    path("", overview.overview, name="overview"),
    path("nodes/", nodes.node_list, name="nodes"),
    path("nodes/<str:name>/", nodes.node_page, name="node"),
    path("nodes/<str:name>/drain/", hardware.cordon, name="node_cordon"),
    path("nodes/<str:name>/offer/", hardware.uncordon, name="node_uncordon"),
    path("nodes/<str:name>/release-driver/", hardware.release_driver, name="node_release_driver"),
    path("nodes/<str:name>/mig/plan/", hardware.mig_plan, name="mig_plan"),
    path("nodes/<str:name>/mig/apply/", hardware.mig_apply, name="mig_apply"),
    path("gpus/<str:uuid>/release/", hardware.release, name="gpu_release"),
    path("gpus/<str:uuid>/quarantine/", hardware.quarantine, name="gpu_quarantine"),
    path("gpus/<str:uuid>/end-process/", hardware.end_process, name="gpu_end_process"),
    path("orders/<uuid:order_id>/cancel/", hardware.order_cancel, name="order_cancel"),
    path("jobs/", jobs.jobs, name="jobs"),
    path("jobs/new/", submit.new_job, name="new_job"),
    path("jobs/new/check/", submit.check_job, name="check_job"),
    path("jobs/<int:job_id>/", jobs.job, name="job"),
    path("jobs/<int:job_id>/stop/", jobs.stop_job, name="stop_job"),
    path("jobs/<int:job_id>/log/", jobs.job_log, name="job_log"),
    path("live/cluster/", live.cluster, name="live_cluster"),
    path("live/jobs/<int:job_id>/", live.job, name="live_job"),
    path("live/jobs/<int:job_id>/log/", live.job_log, name="live_job_log"),
    path("tokens/", accounts.token_list, name="tokens"),
    path("tokens/make/", accounts.token_make, name="token_make"),
    path("tokens/<int:token_id>/revoke/", accounts.token_revoke, name="token_revoke"),
    path("login/", accounts.Login.as_view(), name="account_login"),
    path("logout/", allauth.logout, name="account_logout"),
    path("signup/", accounts.Signup.as_view(), name="account_signup"),
    path("password/", allauth.password_change, name="account_change_password"),
    path("inactive/", allauth.account_inactive, name="account_inactive"),
    path("healthz", health.healthz, name="healthz"),
    path("readyz", health.readyz, name="readyz"),
]
