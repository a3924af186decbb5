from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ("portal", "0002_hardware"),
    ]

    operations = [
        migrations.AddField(
            model_name="hardwareorder",
            name="answered_at",
            field=models.DateTimeField(null=True),
        ),
        migrations.AddField(
            model_name="hardwareorder",
            name="sent_at",
            field=models.DateTimeField(null=True),
        ),
    ]
